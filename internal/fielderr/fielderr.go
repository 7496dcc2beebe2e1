// Package fielderr collects the problems of the fields of a declaration.
package fielderr

import "fmt"

// List has problems, each as "field path: problem". Package errors joins them.
type List []error

// Add adds a problem of the field at a path.
func (l *List) Add(path, format string, args ...any) {
	*l = append(*l, fmt.Errorf("%s: %w", path, fmt.Errorf(format, args...)))
}
