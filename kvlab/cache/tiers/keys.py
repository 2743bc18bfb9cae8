"""Names of saved pages: digests of everything that their bytes depend on.

A page's entries are a function of the model, its storage, what sets the request apart (adapter, media, tenant salt),
and all tokens up to the page's end. The name is a sha256 over all of that, each part with its length before it, so no
two different histories read as the same bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable


def root_digest(fingerprint: bytes, request) -> bytes:
    """What the names of a request's pages start from: the model and its storage, and the request's own setting."""
    digest = hashlib.sha256(b"kvlab saved pages 1")
    for part in (
        fingerprint,
        request.adapter.encode(),
        request.salt.encode(),
        *(repr(m).encode() for m in request.media),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def prefix_digests(root: bytes, tokens: array[int], ends: Iterable[int]) -> dict[int, bytes]:
    """The digest of the first n tokens, for each n of `ends`; one pass over the tokens."""
    digest, done, found = hashlib.sha256(root), 0, {}
    for end in sorted(set(ends)):
        digest.update(tokens[done:end].tobytes())
        done = end
        found[end] = digest.digest()
    return found


def page_name(digest: bytes, group: int, index: int = -1) -> bytes:
    """The name of a page of that group: complete at the digest's last token, or entry `index` of the sequence that ends
    there."""
    return hashlib.sha256(digest + group.to_bytes(4, "little") + index.to_bytes(8, "little", signed=True)).digest()
