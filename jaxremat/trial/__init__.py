"""One trial: a policy at a batch is compiled, measured where the device is in this machine, and written down as a record."""
