// Package checks reads the files that people deploy the agent with by the libraries of the tools that will read them:
// BuildKit's parser of Dockerfiles, the types of Kubernetes, the engine of Helm, the configuration of goreleaser, the
// parsers of Prometheus. It
// also builds the agent as the Dockerfile says, and runs it where there is nothing else: no libc, no shell, no root.
//
// It is a module of its own, so that these libraries are none of the agent's: make prove ONLY=packages.
package checks
