"""One thread for each test process: results do not depend on it (a test of its own says so), and
OpenMP's spinning workers make two busy processes on two cores many times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
