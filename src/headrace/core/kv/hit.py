"""What a sequence finds when it is admitted.

Apart from the manager: wheels have that compiled, which a module with a Struct cannot be.
"""

import msgspec

from headrace.core.base.plan import BlockCopy


class Hit(msgspec.Struct, frozen=True):
    """Tokens whose KV is already there, once `copy` has been carried out."""

    num_tokens: int
    copy: BlockCopy | None = None
