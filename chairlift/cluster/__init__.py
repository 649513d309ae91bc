"""Several replicas on the nodes of a Ray cluster, behind one client that routes between them."""
