"""The ways a command ends badly. The command line turns each into its exit code and one clear message."""


class UserError(Exception):
    """Something the user can put right: a config value, a file, a column."""

    exit_code = 2


class RunFailure(Exception):
    """The run could not go on: a process died, a phase ran out of time, too many invalid samples."""

    exit_code = 1


class PeerGone(RunFailure):
    """Another process ended what both were doing: a consequence, whose cause that process knows."""


class NamesDiffer(UserError):
    """Weights lack tensors that the model has, or hold some that it has not."""

    exit_code = 3


class ValuesDiffer(RunFailure):
    """Two sets of weights that should be equal are not."""

    exit_code = 4


class OutOfResources(RunFailure):
    """Not enough disk or memory for the work."""

    exit_code = 5
