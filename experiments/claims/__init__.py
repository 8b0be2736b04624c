"""What articles and papers say about rematerialization, claim by claim."""

from experiments.common import set_up

set_up()
