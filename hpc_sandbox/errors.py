"""The error that a sandbox cannot be started as asked."""


class SandboxError(Exception):
    """A sandbox cannot start: `what` happened, `where`, and what to `do` now."""

    def __init__(self, what: str, *, where: str, do: str) -> None:
        super().__init__(f"{where}: {what}. {do}.")
        self.what = what
        self.where = where
        self.do = do
