"""A kvhal backend in a package of its own: unquantised records and one index operation, in numpy."""
