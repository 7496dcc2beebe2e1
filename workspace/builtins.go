package workspace

import "strings"

// CheckBuiltins wants every builtin: handler to name one of known, the builtins of the binary that is to run the
// workspace. Neither the files nor the database know them: a library's user has builtins of their own. The
// error is [Problems].
func (w Workspace) CheckBuiltins(known []string) error {
	names := make(map[string]bool, len(known))
	for _, name := range known {
		names[name] = true
	}
	var problems Problems
	for _, document := range w.Skills {
		kind, name, _ := strings.Cut(strings.TrimSpace(document.Definition.Handler), ":")
		if name = strings.TrimSpace(name); kind == "builtin" && !names[name] {
			problems.add(document.place("handler"), "handler: %s", unknown("builtin", name, name, known))
		}
	}
	return problems.err()
}
