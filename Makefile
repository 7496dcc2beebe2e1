# make run    everything here: own PostgreSQL, example workspace, a first heartbeat, HTTP
# make test   all tests of the packages, the pages and the guides
# make prove  the proofs of safety at length: make prove ONLY=lanes for one of them
# make lint   format, vet, lint
# make bench  benchmarks, each beside the raw floor of the same run
# make fuzz   every fuzz target for a while: make fuzz TIME=3m
# make pictures  the pictures of docs/engine-room.md and docs/five-tasks.md, by the tests that look at the pages

.PHONY: run build test prove lint bench fuzz pictures

build:
	go build -trimpath -o bin/agent ./cmd/agent

run:
	go run ./cmd/agent dev

test:
	./scripts/test

prove:
	./scripts/prove $(ONLY)

lint:
	./scripts/lint

bench:
	go test -run '^$$' -bench . -benchtime 2s ./...
	go run ./bench chat-priority
	go run ./bench executions
	go run ./bench waiting
	go run ./bench engine-room
	go run ./bench lanes
	go run ./bench idle
	go run ./bench story

fuzz:
	./scripts/fuzz $(or $(TIME),1m)

pictures:
	AGENT_PICTURES=$(CURDIR)/docs/pictures go test -count=1 \
		-run '^(TestFiveTasks.*|TestOwnerDecidesInEngineRoom)$$' ./engineroom ./cmd/agent
