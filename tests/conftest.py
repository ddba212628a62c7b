"""One torch thread for every test, since xdist fills the cores; and a Ctrl-C that works."""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
