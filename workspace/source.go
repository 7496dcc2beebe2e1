package workspace

import (
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// source is a document as it was written.
type source struct {
	file string
	raw  []byte // of the file
	node *yaml.Node
}

// decode reads the document into a definition and reports what does not fit it.
func (s source) decode(into any) Problems {
	d := &decoder{file: s.file}
	d.object(s.node, reflect.ValueOf(into).Elem(), "", "kind")
	return d.problems
}

// at is where the value of path (config.query, steps[1]) stands, or as much of it as there is; the
// document's own position when there is nothing of it.
func (s source) at(path string) Position { return position(s.file, s.find(path)) }

// find is the node of a path, as at has it.
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

// steps splits a path at its dots and brackets.
func steps(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '.' || r == '[' || r == ']' })
}

// lookup is the value under a key of a mapping, or at an index of a list; nil when there is none.
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

// index is the item of a list at a position that is written in digits.
func index(items []*yaml.Node, step string) *yaml.Node {
	n := 0
	for _, digit := range step {
		if digit < '0' || digit > '9' || n > len(items) {
			return nil
		}
		n = 10*n + int(digit-'0')
	}
	if step == "" || n >= len(items) {
		return nil
	}
	return items[n]
}

// problems places each part of a definition's error, which begins with the path of its field.
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

// flatten takes joined errors apart.
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

// beside places the parts of a definition's error that do not just follow from what could not be read: when something
// could not, those about keys that are absent or were complained about are left out.
func (s source) beside(wrong Problems, err error) Problems {
	found := s.problems(err)
	if len(wrong) == 0 {
		return found
	}
	return slices.DeleteFunc(found, func(p Problem) bool {
		path, _, _ := strings.Cut(p.Message, ": ")
		first := steps(path)
		return len(first) == 0 || lookup(s.node, first[0]) == nil ||
			slices.ContainsFunc(wrong, func(w Problem) bool { return w.Position == p.Position })
	})
}
