"""The HTTP protocol of OpenPipe ART's training server, over the jobs and models of this one."""
