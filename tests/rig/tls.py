"""An authority and what it signed, made by openssl for one test run."""

import subprocess
from pathlib import Path


def authority(place: Path, name: str) -> Path:
    """`ca.pem`, and `node.pem` with `node.key` signed by it for `name` (`DNS:host` or `IP:address`), in that folder."""
    (place / "san.cnf").write_text(f"subjectAltName={name}\n")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for arguments in (
        ["req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA"],
        ["req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node"],
        ["x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
         "-out", "node.pem", "-days", "2", "-extfile", "san.cnf"],
    ):  # fmt: skip
        subprocess.run(["openssl", *arguments], cwd=place, check=True, capture_output=True)
    return place
