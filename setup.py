"""Map the three top-level source folders into one import package, ``liger_multi``.

``backends/`` installs as ``liger_multi.backends`` and ``reference/`` as ``liger_multi.reference``;
an editable install also links them into the checkout, where type checkers and editors look.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
FOLDERS = {
    "liger_multi": "liger_multi",
    "liger_multi.backends": "backends",
    "liger_multi.reference": "reference",
}


def link() -> None:
    """Create the git-ignored links ``liger_multi/backends`` and ``liger_multi/reference``."""
    for package, folder in FOLDERS.items():
        path = ROOT / package.replace(".", "/")
        if path.is_symlink() and not path.exists():
            path.unlink()
        if not path.exists():
            path.symlink_to(Path("..") / folder, target_is_directory=True)


def packages() -> list[str]:
    """Every package of the three folders, without the links of an editable install."""
    found = []
    for package, folder in FOLDERS.items():
        found.append(package)
        for sub in find_packages(str(ROOT / folder)):
            if not (ROOT / folder / sub.split(".")[0]).is_symlink():
                found.append(f"{package}.{sub}")
    return found


class EditableWithLinks(editable_wheel):
    """An editable install that leaves the links behind."""

    def run(self) -> None:
        """Link, then install."""
        link()
        super().run()


setup(package_dir=FOLDERS, packages=packages(), cmdclass={"editable_wheel": EditableWithLinks})
