"""What `plimsoll local` imports once, in the process that all processes of a run, and of its restarts, are forks of.

Nothing here starts a backend of JAX or a thread, which a fork would not survive.
"""

import resource  # noqa: F401

import grain  # noqa: F401
import jax.experimental.multihost_utils  # noqa: F401
import tensorboardX.event_file_writer  # noqa: F401
from orbax.checkpoint import multihost, v1

import framework.run.start
import framework.run.training  # noqa: F401
import launch.train  # noqa: F401

# Orbax imports these when they are first used, so they are used here.
_ = v1.save_checkpointables_async, v1.Context, v1.handlers, multihost.get_barrier_sync_fn
