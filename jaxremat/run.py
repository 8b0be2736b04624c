"""`python -m jaxremat.run`: the command `jaxremat run`."""

from jaxremat.cli.run import main
from jaxremat.system.interrupt import leave

if __name__ == "__main__":
    leave(main())
