"""Signatures of certificates by an organisation's key: Ed25519, in a file beside them.

Make a key with ``openssl genpkey -algorithm ed25519 -out key.pem``, and publish what
``openssl pkey -in key.pem -pubout`` prints.
"""

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from dpoptim.files import write_atomically
from dpoptim.printable import printable

CERTIFICATE, SIGNATURE = "certificate.json", "certificate.sig"
PURPOSE = b"dpoptim certificate 1\n"  # so that a signature for something else does not fit


def sign(folder: Path, key: Path) -> Path:
    """Sign the certificate in a run directory, and return the signature's file.

    Args:
        key: a PEM file with a private Ed25519 key, without a password.

    Raises:
        ValueError: the file holds no such key. OSError: a file cannot be read or written.
    """
    try:
        private = load_pem_private_key(key.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise ValueError(
            f"{printable(str(key))} holds no private Ed25519 key without a password. Fix: openssl "
            "genpkey -algorithm ed25519 -out key.pem"
        )
    signature = private.sign(PURPOSE + (folder / CERTIFICATE).read_bytes())
    path = folder / SIGNATURE
    write_atomically(path, signature.hex() + "\n")
    return path


def check_signature(folder: Path, key: Path) -> None:
    """Check the signature of the certificate in a run directory.

    Args:
        key: a PEM file with a public Ed25519 key.

    Raises:
        ValueError: there is no signature, or it is not by this key over this certificate.
    """
    try:
        public = load_pem_public_key(key.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if not isinstance(public, Ed25519PublicKey):
        raise ValueError(
            f"{printable(str(key))} holds no public Ed25519 key. Fix: openssl pkey -in key.pem "
            "-pubout"
        )
    path = folder / SIGNATURE
    if not path.is_file():
        raise ValueError(
            f"{printable(str(path))} is missing: the certificate was not signed (dpoptim sign)."
        )
    try:
        public.verify(
            bytes.fromhex(path.read_bytes().decode("ascii").strip()),
            PURPOSE + (folder / CERTIFICATE).read_bytes(),
        )
    except (InvalidSignature, ValueError):
        raise ValueError(
            f"{printable(str(path))} is not this key's signature of the certificate; do not trust "
            "it."
        ) from None
