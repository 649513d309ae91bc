"""The loop: plan, execute, commit; and how others talk to it."""
