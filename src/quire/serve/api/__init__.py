"""The routes, one module or sub-package per API."""
