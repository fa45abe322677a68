"""Plans that ship with the package, as JSON."""
