"""The errors of rollflow; catch `RLCoreError` for all of them.

* RLCoreError
  x ConfigError (ValueError)              what a user asked for cannot be done; lists every problem
    - UnsupportedVerlKeyError             a real verl key that rollflow does not implement
  x DataError (ValueError)                a file, row or column is wrong; names it
  x PayloadTooLargeError (ValueError)     a phase's parameters or result are over the size limit
  x BodyError (RuntimeError)              a phase's body raised something that cannot travel
  x FencedError (RuntimeError)            a call of an older attempt or try; never retried
  x DeviceLockError (RuntimeError)        another run holds the devices; names it
  x RolloutError (RuntimeError)           generation or an agent loop failed
    - TooManyFailuresError                over `reward.max_failure_ratio` of sessions failed
    - RewardError                         a reward function raised, or its process died
      . RewardTimeoutError (TimeoutError) it took longer than `reward.timeout` and was killed
    - ToolError                           a tool raised, or its process died
      . ToolTimeoutError (TimeoutError)   it took longer than `multi_turn.tool_timeout`
    - TextEnvironmentError                an environment raised, or its process died
      . EnvironmentTimeoutError (TimeoutError) it took longer than `multi_turn.tool_timeout`
  x NonFiniteLossError (RuntimeError)     too many non-finite optimizer steps in a row
  x StateChangeError (RuntimeError)       a phase body changed an attribute other than `state`
  x WeightSyncError (RuntimeError)        a weight update was not committed
    - WeightTransferError                 the bytes did not arrive; a TransientError, too
  x CheckpointError (RuntimeError)        a checkpoint cannot be read or written
  x TransientError (RuntimeError)         what tasks/retry.py retries, and nothing else
    - DeadlineExceededError               a wait was overdue; says who waits for whom
      . PhaseTimeoutError (TimeoutError)  a phase's body was overdue and was killed
    - ExecutorDiedError                   a phase's process died
    - ReplicaBusyError                    an LLM server has requests in flight
    - ReplicaDiedError                    an LLM server died
    - ActorUnavailableError               a collaborator's process died or does not answer
      . NoReplicaError                    no LLM server serves
      . TrainingGroupLostError            a training rank died or hangs: all are started anew
  x RankDisagreementError (RuntimeError)  ranks of a training group are at different steps

Every class takes one message only, so that it survives pickling through Ray and Prefect.
"""


class RLCoreError(Exception):
    """Base of all errors of rollflow."""


def attempt_of(error: BaseException) -> list[str]:
    """Return the notes on `error` that name the attempt it ended; none if no attempt had begun."""
    return list(getattr(error, "__notes__", ()))


class ConfigError(RLCoreError, ValueError):
    """The configuration cannot be run; the message lists every problem found."""


class UnsupportedVerlKeyError(ConfigError):
    """A real verl key that rollflow does not implement."""


class DataError(RLCoreError, ValueError):
    """A file, row or column is wrong; the message names it."""


class PayloadTooLargeError(RLCoreError, ValueError):
    """A phase's parameters or result are over the size limit; the message says by how much."""


class BodyError(RLCoreError, RuntimeError):
    """A phase's body ended with something that cannot be rebuilt in the driver."""


class FencedError(RLCoreError, RuntimeError):
    """A call of an older attempt or try was refused."""


class DeviceLockError(RLCoreError, RuntimeError):
    """Another run holds the devices; the message names it."""


class RolloutError(RLCoreError, RuntimeError):
    """Generation or an agent loop failed."""


class TooManyFailuresError(RolloutError):
    """A larger share of sessions failed than the configuration allows."""


class RewardError(RolloutError):
    """A reward function raised or its process died; the message has its traceback."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function took too long; its process was killed."""


class ToolError(RolloutError):
    """A tool raised or its process died; the message has its traceback."""


class ToolTimeoutError(ToolError, TimeoutError):
    """A tool took too long."""


class TextEnvironmentError(RolloutError):
    """A text environment raised or its process died; the message has its traceback."""


class EnvironmentTimeoutError(TextEnvironmentError, TimeoutError):
    """A text environment took too long; its process was killed."""


class NonFiniteLossError(RLCoreError, RuntimeError):
    """The loss or gradient was not finite in too many optimizer steps in a row."""


class StateChangeError(RLCoreError, RuntimeError):
    """A phase body changed an attribute of the trainer other than `state`."""


class WeightSyncError(RLCoreError, RuntimeError):
    """A weight update was not committed."""


class CheckpointError(RLCoreError, RuntimeError):
    """A checkpoint cannot be read or written."""


class TransientError(RLCoreError, RuntimeError):
    """A fault that may pass: retried with backoff and counted."""


class WeightTransferError(WeightSyncError, TransientError):
    """Weights did not arrive, or other bytes than were sent: the update may be tried again."""


class DeadlineExceededError(TransientError):
    """A wait was overdue; the message says who waits for whom."""


class PhaseTimeoutError(DeadlineExceededError, TimeoutError):
    """A phase's body was overdue; its executor was killed and is dead."""


class ExecutorDiedError(TransientError):
    """The process that ran a phase's body died."""


class ReplicaBusyError(TransientError):
    """An LLM server has requests in flight that this call does not allow."""


class ReplicaDiedError(TransientError):
    """An LLM server died: the attempt ends as crashed, and a new one continues the run."""


class ActorUnavailableError(TransientError):
    """A collaborator's process died or does not answer."""


class NoReplicaError(ActorUnavailableError):
    """No LLM server serves, and none has come back in time; nothing that was asked is to blame."""


class TrainingGroupLostError(ActorUnavailableError):
    """A training rank died or hangs; no call to its group can help, only a new group."""


class RankDisagreementError(RLCoreError, RuntimeError):
    """The ranks of a training group are at different steps: none of them can be believed."""
