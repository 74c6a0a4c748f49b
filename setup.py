"""The README as a package index shows it, where relative links lead nowhere. All else is in setup.cfg."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description(readme: str, source: str | None) -> str:
    """Makes relative links absolute, from the address of the repository; without one leaves their text alone."""
    links = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)]*)\)")
    if source is None:
        return links.sub(lambda link: "" if link[1] else link[2], readme)
    return links.sub(
        lambda link: f"{link[1]}[{link[2]}]({source}/{'raw' if link[1] else 'blob'}/HEAD/{link[3]})", readme
    )


def project_urls() -> dict[str, str]:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings.get("metadata", "project_urls", fallback="").strip().splitlines()
    return {name.strip(): url.strip() for name, url in (line.split("=", 1) for line in lines)}


if __name__ == "__main__":
    setup(long_description=long_description((ROOT / "README.md").read_text(), project_urls().get("Source")))
