"""Map the three top-level source folders into one import package, ``liger_multi``.

``backends/`` installs as ``liger_multi.backends`` and ``reference/`` as ``liger_multi.reference``;
an editable install also links them into the checkout, and puts ``.editable`` on the path, which
holds a link to the package and nothing else: type checkers and editors follow it, as they do not
follow the import hook that setuptools would install for folders of other names.

Folders whose ``__init__.py`` would be empty have none here, and have one in a wheel: in a zip,
Python finds no package without it.

``REPOSITORY`` in the environment is the address that a release is made from: metadata then names
it, and the links of the readme lead there, since a package index has none of the files.
"""

import os
import re
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
FOLDERS = {
    "liger_multi": "liger_multi",
    "liger_multi.backends": "backends",
    "liger_multi.reference": "reference",
}


EDITABLE = ".editable"


def link() -> None:
    """Create the git-ignored links of packages within the package, and ``.editable``."""
    (ROOT / EDITABLE).mkdir(exist_ok=True)
    links = {package.replace(".", "/"): folder for package, folder in FOLDERS.items()}
    links[f"{EDITABLE}/liger_multi"] = "liger_multi"
    for name, folder in links.items():
        path = ROOT / name
        if path.is_symlink() and not path.exists():
            path.unlink()
        if not path.exists():
            path.symlink_to(Path("..") / folder, target_is_directory=True)


def packages() -> list[str]:
    """Every package of the three folders, without the links of an editable install.

    Launch tables stand in folders without code, which setuptools wants named as packages as well.
    """
    found = []
    for package, folder in FOLDERS.items():
        found.append(package)
        for sub in find_namespace_packages(str(ROOT / folder), exclude=["*__pycache__*"]):
            if not (ROOT / folder / sub.split(".")[0]).is_symlink():
                found.append(f"{package}.{sub}")
    return found


def readme(repository: str) -> str:
    """README.md; its relative links are absolute where a repository is given."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not repository:
        return text
    relative = r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)"
    return re.sub(
        relative,
        lambda m: f"{m[1]}{m[2]}({repository}/{'raw' if m[1] else 'blob'}/HEAD/{m[3]})",
        text,
    )


def addresses(repository: str) -> dict[str, str]:
    """The pages of a repository that an index shows."""
    pages = {
        "Repository": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + path for name, path in pages.items() if repository}


class BuildWithInits(build_py):
    """A build in which every folder of modules has an ``__init__.py``."""

    def run(self) -> None:
        """Build, then add the empty ones."""
        super().run()
        if self.editable_mode:
            return
        for package in self.packages:
            folder = Path(self.build_lib, *package.split("."))
            if any(folder.glob("*.py")):
                (folder / "__init__.py").touch()


class EditableWithLinks(editable_wheel):
    """An editable install that leaves the links behind, and whose path has them."""

    def run(self) -> None:
        """Link, then install."""
        link()
        self.package_dir = self.distribution.package_dir = {"": EDITABLE}
        super().run()


REPOSITORY = os.environ.get("REPOSITORY", "").rstrip("/")
setup(
    package_dir=FOLDERS,
    packages=packages(),
    cmdclass={"build_py": BuildWithInits, "editable_wheel": EditableWithLinks},
    long_description=readme(REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=addresses(REPOSITORY),
)
