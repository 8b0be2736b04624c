"""Several devices: the axes of a mesh, and the shardings that follow from them."""
