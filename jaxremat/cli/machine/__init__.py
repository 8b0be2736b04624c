"""What stands in the way of using this machine: the doctor's checks, and blame."""
