"""One attempt at a policy and a batch: compiled, measured where the device is here, and recorded."""
