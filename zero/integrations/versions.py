"""The versions of other libraries that the integrations are tested with. setup.cfg asks for the oldest, too."""

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion

from zero._torch.telling import warn_user

TESTED = {
    "accelerate": ("1.15.0", "1.15"),
    "transformers": ("5.23.0", "5.24"),
    "lightning": ("2.6.0", "2.6"),
}
"""The oldest, and of the newest the first two numbers."""


def refuse_older(library: str) -> None:
    """Raises ImportError for a library that lacks what the integration calls, before only some ranks find out; warns of
    one that is newer than what was tested."""
    oldest, newest = TESTED[library]
    try:
        found = version(library)
    except PackageNotFoundError:
        found = None
    if found is None or TorchVersion(found) < oldest:
        raise ImportError(
            f"zero.integrations.{library} needs {library} {oldest} or newer, and {found or 'none'} is installed. Run: "
            f"pip install --upgrade '{library}>={oldest}'"
        )
    if TorchVersion(found) >= f"{newest}.999":
        warn_user(
            f"{library} {found} is newer than {newest}, the newest that this version of zero was tested with. Compare "
            "a few steps with stage 0, and look for a newer zero."
        )
