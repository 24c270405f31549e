"""The sources of horovod_oktopk.torch and horovod_oktopk.tensorflow, to which links in horovod_oktopk/ point."""

raise ImportError("integrations is no package, and would be a second copy of one that the program has: import "
                  "horovod_oktopk.torch or horovod_oktopk.tensorflow")
