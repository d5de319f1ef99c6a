"""One thread for each test process: results do not depend on it (a test of its own says so), and
OpenMP's spinning workers make two busy processes on two cores many times slower."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job starts with SIGINT ignored, and so would the programs that tests start
# and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
