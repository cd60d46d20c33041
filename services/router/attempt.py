"""One request's way in, remembered while a router tries through what the broker does."""

import msgspec

from headrace.router.admission import Wish
from headrace.router.placement import Placed
from headrace.router.settlement import Paid
from headrace.schemas.subjects import JobId

__all__ = ["Try"]


class Try(msgspec.Struct):
    """What is settled about a request, through all tries to take it in.

    `job` is its id unless the client chose one; `asked` the request at the model asked for, None once it went on.
    With `is_unclear` the broker may have its message: then it stays where it is, and what it paid stays paid. Once it
    `is_answered` it is not answered again.
    """

    job: JobId
    asked: Wish | None = None
    placed: Placed | None = None
    paid: Paid | None = None
    is_unclear: bool = False
    is_answered: bool = False
