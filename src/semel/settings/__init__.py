"""Settings that come from outside the code: files, flags, the environment. The only place that reads them.

Each component declares its own section, next to it; what is here belongs to a process as a whole, and puts the sections
together into what a command takes. Light to import: the command line is made from it.
"""
