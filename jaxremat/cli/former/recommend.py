"""`python -m jaxremat.recommend`, the former name of `jaxremat recommend`. For version 0.2."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("recommend")
