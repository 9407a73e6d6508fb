"""A hook of Python's own: every process of a server that is started with this folder on its path has switches."""

from tools.security.switches import install

install()
