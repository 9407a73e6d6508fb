"""A hook of Python's own: every process of a server that is started with this folder on its path has switches."""

from tests.security.switches import install

install()
