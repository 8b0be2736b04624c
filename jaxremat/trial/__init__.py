"""One trial: a policy at a batch is compiled, measured and written down as a record.

It is measured where the device is in this machine.
"""
