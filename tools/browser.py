"""Sees to a Chromium for the browser tests: present, or installed by apt as root on Debian, or one line that says how."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from kvlab.cli.doctor import find_browser


def main() -> int:
    """0 when there is a browser afterwards."""
    if find_browser():
        print(f"browser: {find_browser()}")
        return 0
    if shutil.which("apt-get") and os.geteuid() == 0:
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"],
        ):
            subprocess.run(command, env=quiet, check=False, stdout=subprocess.DEVNULL)
    if find_browser():
        print(f"browser: {find_browser()}")
        return 0
    print(
        "browser: no Chromium. Install it (Debian: sudo apt-get install chromium; macOS: Google Chrome) or set KVLAB_BROWSER."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
