"""Builds the package with the standard library, so pip needs neither a network nor other packages (PEP 517)."""

import base64
import hashlib
import tarfile
import tomllib
import zipfile
from pathlib import Path

here = Path(__file__).parent
project = tomllib.loads((here / "pyproject.toml").read_text())["project"]
base = f"{project['name']}-{project['version']}"
modules = sorted(p for p in (here / "lanekeeper").iterdir() if p.suffix in (".py", ".pyi") or p.name == "py.typed")


def metadata():
    return (
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\nLicense: {project['license']['text']}\n"
        f"Requires-Python: {project['requires-python']}\nDescription-Content-Type: text/markdown\n\n"
        + (here / project["readme"]).read_text()
    )


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    files = {f"lanekeeper/{p.name}": p.read_bytes() for p in modules}
    files[f"{base}.dist-info/METADATA"] = metadata().encode()
    files[f"{base}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: lanekeeper\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{base}.dist-info/RECORD"] = (record + f"{base}.dist-info/RECORD,,\n").encode()
    wheel = f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in files.items():
            out.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    name = f"{base}.tar.gz"
    with tarfile.open(Path(sdist_directory) / name, "w:gz") as out:
        for p in [*modules, here / "pyproject.toml", here / "build_backend.py", here / project["readme"]]:
            out.add(p, f"{base}/{p.relative_to(here)}")
    return name
