// Package guides runs every command of the guides in docs/guide, of README.md, and of the pages of docs with a
// `console`, and compares its output with the page. One shell runs a page from its top in a folder of its own, with the
// agent built from this source. Its fenced blocks are
//
//   - `console`: lines that begin with `$ ` are commands (lines that begin with `> ` continue them). Their output
//     follows, including standard error. `…` stands for any text in a line; on a line of its own, for any lines. A
//     command ends with exit code 0; a command without listed output may print anything.
//   - `console background`: one command that runs until the page's end; the page continues after the command has
//     printed the lines.
//   - `console elsewhere`: commands for a missing environment: an engine of containers, a cluster, a service manager.
//     They do not run; this package lists each of them.
//   - a block with file=NAME is written to that file.
//
// Other blocks, such as `sql`, are shown and do not run. The exception is the only `sh` block, with the two commands at
// the top of README.md. The first runs until the page's end, as `agent dev`; the second runs this test. A test contains
// and compiles the Go code of every page. If a page begins with the line `<!-- database -->`, its database is
// DATABASE_URL. An empty database replaces each one that a page names as postgres://agent:agent@localhost/NAME, and a
// free address replaces 127.0.0.1:8080.
package guides
