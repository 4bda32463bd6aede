"""The two ways a run ends badly. The command line turns them into exit codes and one clear message."""


class UserError(Exception):
    """Something the user can put right: a config value, a file, a column. Exit code 2."""


class RunFailure(Exception):
    """The run could not go on: a process died, a phase ran out of time, too many invalid samples. Exit code 1."""
