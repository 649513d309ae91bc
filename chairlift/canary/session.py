"""Which session a request belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Fallback = Literal["address", "request"]
FALLBACKS: tuple[Fallback, ...] = ("address", "request")


@dataclass(frozen=True, slots=True)
class SessionRule:
    """Where the name of a session is looked for: in a header, in the body's ``user``, in the client's address.

    Attributes:
        header: name of the header, in lower case.
        fallback: ``address`` takes the client's address for want of a name; ``request`` makes each such request a
            session of its own, which is right behind a load balancer, where many clients share an address.
        trust_forwarded: take the address from the first entry of ``X-Forwarded-For``, which a client can write itself.
    """

    header: str = "x-session-id"
    fallback: Fallback = "address"
    trust_forwarded: bool = False

    def session_of(self, headers: Mapping[str, str], body: object, address: str) -> str | None:
        """Returns the name of a request's session, or ``None`` if it belongs to none.

        Args:
            headers: by their names in lower case.
            body: decoded JSON, or anything else.
            address: of the client's end of the connection.
        """
        if named := headers.get(self.header, "").strip():
            return f"header {named}"
        user = body.get("user") if isinstance(body, dict) else None
        if isinstance(user, str) and user:
            return f"user {user}"
        if self.fallback == "request":
            return None
        if self.trust_forwarded and (first := headers.get("x-forwarded-for", "").partition(",")[0].strip()):
            return f"address {first}"
        return f"address {address}"
