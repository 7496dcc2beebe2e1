// Package webassets has the files that both the chat page and the Engine Room serve: markdown-it, DOMPurify, and
// markdown.js, which renders Markdown as a sanitised fragment. The binary has one copy of each.
package webassets

import "embed"

// Files has the scripts in its root, with their licences.
//
//go:embed *.js LICENSES.txt
var Files embed.FS
