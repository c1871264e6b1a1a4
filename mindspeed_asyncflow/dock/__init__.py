"""The transfer dock: rows of one sample each, typed columns of any length, and tasks that claim what is ready.

`server.py` runs one controller/warehouse pair, `client.py` is what every other process uses.
"""
