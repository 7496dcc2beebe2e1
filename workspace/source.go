package workspace

import (
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// source is the source of a document.
type source struct {
	file string
	raw  []byte // of the file
	node *yaml.Node
}

// decode decodes the document and reports mismatches.
func (s source) decode(into any) Problems {
	d := &decoder{file: s.file}
	d.object(s.node, reflect.ValueOf(into).Elem(), "", "kind")
	return d.problems
}

// at returns the position of a path (config.query, steps[1]), or of its longest existing prefix.
func (s source) at(path string) Position { return position(s.file, s.find(path)) }

func (s source) find(path string) *yaml.Node {
	found := s.node
	node := s.node
	for _, step := range steps(path) {
		next := lookup(node, step)
		if next == nil {
			break
		}
		found, node = next, next
	}
	return found
}

// steps splits a path at dots and brackets.
func steps(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '.' || r == '[' || r == ']' })
}

// lookup returns the value under a key of a mapping or an index of a list, or nil.
func lookup(node *yaml.Node, step string) *yaml.Node {
	switch node.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == step {
				return node.Content[i+1]
			}
		}
	case yaml.SequenceNode:
		return index(node.Content, step)
	}
	return nil
}

// index returns the item with a decimal index; nil for any other text.
func index(items []*yaml.Node, step string) *yaml.Node {
	n, err := strconv.ParseUint(step, 10, 31)
	if err != nil || int(n) >= len(items) {
		return nil
	}
	return items[n]
}

// problems assigns positions to the parts of a validation error. Each part begins with its field's path.
func (s source) problems(err error) Problems {
	var list Problems
	for _, e := range flatten(err) {
		path, _, ok := strings.Cut(e.Error(), ": ")
		if !ok || strings.ContainsAny(path, " \"") {
			path = ""
		}
		list.add(s.at(path), "%s", e)
	}
	return list
}

// flatten splits joined errors.
func flatten(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, flatten(e)...)
	}
	return all
}

// independentProblems assigns positions to validation errors. If the document has decoding problems, it keeps only the
// errors of keys that the document has, at positions without a decoding problem. The others may follow from those.
func (s source) independentProblems(decoding Problems, err error) Problems {
	list := s.problems(err)
	if len(decoding) == 0 {
		return list
	}
	return slices.DeleteFunc(list, func(p Problem) bool {
		path, _, _ := strings.Cut(p.Message, ": ")
		first := steps(path)
		return len(first) == 0 || lookup(s.node, first[0]) == nil ||
			slices.ContainsFunc(decoding, func(d Problem) bool { return d.Position == p.Position })
	})
}
