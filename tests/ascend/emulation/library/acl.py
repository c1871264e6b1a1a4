"""As much of CANN's Python binding as Ray asks to count devices."""

import os


class rt:
    @staticmethod
    def get_device_count():
        return int(os.environ.get("EMULATED_NPUS", "1")), 0
