"""The Litestar handlers: one file per route group, each route one small function."""
