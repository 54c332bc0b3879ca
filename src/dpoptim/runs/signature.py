"""Signatures of certificates and evaluations by an organisation's key: Ed25519, beside them.

Make a key with ``openssl genpkey -algorithm ed25519 -out key.pem``, and publish what
``openssl pkey -in key.pem -pubout`` prints.
"""

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from dpoptim.files import write_atomically
from dpoptim.printable import printable
from dpoptim.runs.evaluations import NAME

CERTIFICATE = "certificate.json"
PURPOSES = {  # so that a signature for something else does not fit
    CERTIFICATE: b"dpoptim certificate 1\n",
    NAME: b"dpoptim evaluations 1\n",
}


def signature_of(document: str) -> Path:
    return Path(document).with_suffix(".sig")


def sign(folder: Path, key: Path) -> list[Path]:
    """Sign certificate and evaluations in a run directory, and return the signatures' files.

    The certificate names digests of model, schema and report.

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
    paths = []
    for name in documents_of(folder):
        signature = private.sign(PURPOSES[name] + (folder / name).read_bytes())
        paths.append(folder / signature_of(name))
        write_atomically(paths[-1], signature.hex() + "\n")
    return paths


def documents_of(folder: Path) -> list[str]:
    """Names of the documents that a signature covers; the certificate is always one."""
    return [name for name in PURPOSES if name == CERTIFICATE or (folder / name).exists()]


def check_signatures(folder: Path, key: Path) -> tuple[list[str], list[str]]:
    """Check the signatures of the documents in a run directory.

    Args:
        key: a PEM file with a public Ed25519 key.

    Returns:
        names of documents that are signed by it, and of evaluations that nobody signed.

    Raises:
        ValueError: the certificate is not signed, or a signature is not by this key over what is
            there.
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
    signed = []
    for name in documents_of(folder):
        path = folder / signature_of(name)
        if path.is_file():
            check(public, folder, name)
            signed.append(name)
        elif name == CERTIFICATE:
            raise ValueError(
                f"{printable(str(path))} is missing: the certificate was not signed (dpoptim sign)."
            )
    return signed, [name for name in documents_of(folder) if name not in signed]


def check(public: Ed25519PublicKey, folder: Path, name: str) -> None:
    """Raise ValueError unless the signature of a document is by this key."""
    path = folder / signature_of(name)
    try:
        public.verify(
            bytes.fromhex(path.read_bytes().decode("ascii").strip()),
            PURPOSES[name] + (folder / name).read_bytes(),
        )
    except (InvalidSignature, ValueError):
        raise ValueError(
            f"{printable(str(path))} is not this key's signature of {name}; do not trust it."
        ) from None
