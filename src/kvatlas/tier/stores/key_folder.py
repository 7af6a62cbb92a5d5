"""`KeyFolder`: the keys with which `EncryptedStore` encrypts the objects of each tenant."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.tier.stores.folder_files import sync_folder

KEY = 32
"""Bytes of a key."""
_OF_OTHERS = 0o066
"""Permissions of group and others to read or write."""


class KeyFolder:
    """A folder with the key of each tenant: 32 bytes in `DIGEST.key`.

    DIGEST is the tenant's digest, as object names and `kvatlas tier ls` contain it. Keys are read
    for each call of the store, so that a deleted key takes effect at once. A key that other users
    can read or write is refused.

    >>> from tempfile import mkdtemp
    >>> keys = KeyFolder(mkdtemp())
    >>> path = keys.create("acme")
    >>> len(keys.key(path.stem)), keys.has("0" * 32)
    (32, False)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def create(self, tenant: str) -> Path:
        """Write a random key for a tenant, given by its name, and return the path of the file.

        The file appears only after all of its bytes are on disk.
        """
        digest = blake2b(tenant.encode(), digest_size=16).hexdigest()
        path = self.path / f"{digest}.key"
        new = self.path / f".{digest}.{os.urandom(8).hex()}.new"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with open(new, "xb", opener=lambda name, how: os.open(name, how, 0o600)) as file:
                    file.write(os.urandom(KEY))
                    file.flush()
                    os.fsync(file.fileno())
                os.link(new, path)  # unlike a rename, it never replaces a key
            finally:
                new.unlink(missing_ok=True)
            sync_folder(self.path)
        except OSError as fault:
            problem = "The key of the tenant cannot be written"
            hint = (
                "Check the folder's permissions. If the tenant has a key already, do not delete "
                "this key: stored rows can be read only with it"
            )
            raise AtlasError(Code.UNWRITABLE, problem, got=str(fault), hint=hint) from None
        return path

    def has(self, digest: str) -> bool:
        """Return whether `key` would return a key for a tenant, given by its digest."""
        try:
            self.key(digest)
        except AtlasError:
            return False
        return True

    def key(self, digest: str) -> bytes:
        """Return the key of a tenant, given by its digest. Raises an error if there is none.

        A file of another size, or one that other users can read or write, is refused too.
        """
        path = self.path / f"{digest}.key"
        try:
            with path.open("rb") as file:
                mode, found = os.fstat(file.fileno()).st_mode, file.read(KEY + 1)
        except OSError as fault:
            raise _unreadable(
                f"{path}: {fault.strerror}", "Restore the key of the tenant"
            ) from None
        if mode & _OF_OTHERS:
            got = f"{path} with mode {mode & 0o777:03o}"
            raise _unreadable(got, "Allow only the owner of the file to access it: chmod 600")
        if len(found) != KEY:
            size = f"{len(found)} bytes" if len(found) < KEY else f"more than {KEY} bytes"
            hint = f"Restore the tenant's key of {KEY} bytes, which KeyFolder.create wrote"
            raise _unreadable(f"{path} of {size}", hint)
        return found


def _unreadable(got: str, hint: str) -> AtlasError:
    problem = "The key that encrypts the rows of a tenant cannot be used"
    return AtlasError(Code.ROW_UNREADABLE, problem, got=got, hint=hint)
