// Package guides runs every command of the guides in docs/guide, of README.md, and of those pages of docs that have a
// `console`, and compares what it prints with what the page says. A page is run from its top in a folder of its own,
// by one shell, with the agent built from this source. Its fenced blocks are
//
//   - `console`: lines that begin with `$ ` are commands (those that begin with `> ` go on with them), what follows is
//     their output, standard error included. `…` stands for any text in a line, and for any lines where it is alone. A
//     command ends with exit code 0; one without output says anything.
//   - `console background`: one command that goes on until the page's end; the page goes on when it has said the
//     lines.
//   - `console elsewhere`: what needs what is not here: an engine of containers, a cluster, a service manager. It is
//     not run, and each of its commands is listed in this package.
//   - a block with file=NAME is written to that file.
//
// Other blocks, such as `sql`, are shown and not run, except `sh`: the only one is that of the two commands at the
// top of README.md, of which the first goes on until the page's end, as `agent dev`, and the second is what runs
// this. Go that any page shows stands in a test, where it is compiled. A page's database is DATABASE_URL where the
// page begins with the line `<!-- database -->`. Each database that a page names as
// postgres://agent:agent@localhost/NAME is replaced by an empty one, and the address 127.0.0.1:8080 by one that is
// free.
package guides
