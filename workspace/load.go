package workspace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// maxFile bounds a file in bytes.
const maxFile = 1 << 20

// LoadDir is [Load] for a folder on disk; positions begin with its name.
func LoadDir(dir string) (Workspace, error) {
	switch info, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return Workspace{}, fmt.Errorf("load workspace: there is no folder %s", dir)
	case err != nil:
		return Workspace{}, fmt.Errorf("load workspace: %w", err)
	case !info.IsDir():
		return Workspace{}, fmt.Errorf("load workspace: %s is a file; name the folder it is in", dir)
	}
	return load(os.DirFS(dir), dir)
}

// LoadFrom is LoadDir for files from elsewhere; dir names the folder in positions.
func LoadFrom(fsys fs.FS, dir string) (Workspace, error) { return load(fsys, dir) }

// Load reads every .yaml and .yml file of a folder and its subfolders, except hidden files and folders. Invalid files
// return [Problems] and an empty workspace. A folder without files is an error, because an apply would remove
// everything.
func Load(fsys fs.FS) (Workspace, error) { return load(fsys, "") }

func load(fsys fs.FS, dir string) (Workspace, error) {
	files, err := find(fsys)
	if err != nil {
		return Workspace{}, fmt.Errorf("load workspace: %w", err)
	}
	if len(files) == 0 {
		return Workspace{}, fmt.Errorf("load workspace: %s has no .yaml file; agent init begins a workspace",
			filepath.Join(dir, "."))
	}
	l := &loader{fsys: fsys, first: make(map[string]Position)}
	for _, name := range files {
		l.file(name, filepath.Join(dir, filepath.FromSlash(name)))
	}
	if err := l.problems.err(); err != nil {
		return Workspace{}, err
	}
	return l.workspace, nil
}

// find lists the YAML files. It reads linked files, but does not follow linked folders.
func find(fsys fs.FS) ([]string, error) {
	var files []string
	err := fs.WalkDir(fsys, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		hidden := strings.HasPrefix(entry.Name(), ".") && name != "."
		switch ext := path.Ext(name); {
		case entry.IsDir() && hidden:
			return fs.SkipDir
		case entry.IsDir() || hidden || ext != ".yaml" && ext != ".yml":
			return nil
		}
		info, err := fs.Stat(fsys, name)
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			files = append(files, name)
		}
		return nil
	})
	return files, err
}

// loader collects documents and problems.
type loader struct {
	fsys      fs.FS
	name      string // of the present file
	raw       []byte // content of the present file
	workspace Workspace
	problems  Problems
	first     map[string]Position // position of the declaration of "kind name"
}

// file reads the documents of one file; shown is the file's name in positions.
func (l *loader) file(name, shown string) {
	l.name = name
	raw, err := read(l.fsys, name)
	if err != nil {
		l.problems.add(Position{File: shown}, "%s", err)
		return
	}
	l.raw = raw
	documents := yaml.NewDecoder(bytes.NewReader(raw))
	for {
		var root yaml.Node
		err := documents.Decode(&root)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			line, message := syntaxError(err)
			l.problems.add(Position{File: shown, Line: line}, "is not YAML: %s%s", message, syntaxAdvice(message))
			return
		}
		if node := root.Content[0]; node.ShortTag() != "!!null" {
			l.document(shown, node)
		}
	}
}

func read(fsys fs.FS, name string) ([]byte, error) {
	file, err := fsys.Open(name)
	if err != nil {
		return nil, fmt.Errorf("cannot be read: %w", err)
	}
	raw, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("cannot be read: %w", err)
	}
	if len(raw) > maxFile {
		return nil, fmt.Errorf("is larger than %d bytes; split it", maxFile)
	}
	return raw, nil
}

// document reads one document by its kind.
func (l *loader) document(file string, node *yaml.Node) {
	if node.Kind != yaml.MappingNode {
		l.problems.add(position(file, node), "is %s; a document is a mapping that begins with kind: %s",
			describeNode(node), kindList())
		return
	}
	value := lookup(node, "kind")
	if value == nil {
		l.problems.add(position(file, node), "kind: is missing; write kind: %s", kindList())
		return
	}
	for _, k := range kinds() {
		if value.Kind == yaml.ScalarNode && k.name == value.Value {
			k.read(l, source{file: file, raw: l.raw, node: node})
			return
		}
	}
	l.problems.add(position(file, value), "%s", unknownName("kind", value.Value, value.Value, kindNames()))
}

// addName rejects a second document of the same kind and name.
func (l *loader) addName(kind, name string, s source) {
	if name == "" {
		return // the kind's own check reports it
	}
	at := s.at("name")
	if first, taken := l.first[kind+" "+name]; taken {
		l.problems.add(at, "name: there is another %s %q at %s", kind, name, first)
		return
	}
	l.first[kind+" "+name] = at
}

// rejectZero rejects a 0 for a number whose default a definition writes as 0.
func (l *loader) rejectZero(key string, s source) {
	node, n := lookup(s.node, key), 0
	if node != nil && node.ShortTag() == "!!int" && node.Decode(&n) == nil && n == 0 {
		l.problems.add(s.at(key), "%s: is 0; write at least 1, or leave it out for the default", key)
	}
}

var yamlLine = regexp.MustCompile(`^line (\d+): `)

// syntaxError extracts the line from a parser error; 0 without one.
func syntaxError(err error) (int, string) {
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	match := yamlLine.FindStringSubmatch(message)
	if match == nil {
		return 0, message
	}
	line, err := strconv.Atoi(match[1])
	if err != nil {
		return 0, message
	}
	return line, message[len(match[0]):]
}

// syntaxAdvice suggests a fix for a parser message.
func syntaxAdvice(message string) string {
	for problem, todo := range map[string]string{
		"cannot start any token":                   "indent with blanks and not with a tab, and quote a text that begins " + "with @, ` or %",
		"mapping values are not allowed":           `quote a text that has a ":", and give the keys of a mapping the same indentation`,
		"expected alphabetic or numeric":           "quote a text that begins with * or &",
		"did not find expected key":                "check the indentation and the quotes there and above",
		"could not find expected ':'":              "check the indentation and the quotes there and above",
		"did not find expected '-' indicator":      "check the indentation there and above",
		"did not find expected ',' or ']'":         "close the list with ]",
		"did not find expected ',' or '}'":         "close the mapping with }",
		"found unexpected end of stream":           "close the quotes of a text above",
		"found unknown escape character":           "write a text with a backslash in single quotes",
		"did not find expected whitespace or line": "quote a text that begins with | or >",
	} {
		if strings.Contains(message, problem) {
			return "; " + todo
		}
	}
	return ""
}

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

// independentProblems assigns positions to validation errors. After decoding problems, it drops errors that follow from
// these problems: absent or already reported keys.
func (s source) independentProblems(wrong Problems, err error) Problems {
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

// maxDepth bounds the nesting of a document.
const maxDepth = 50

// decoder decodes one document and collects problems.
type decoder struct {
	file     string
	problems Problems
}

func (d *decoder) add(node *yaml.Node, format string, args ...any) {
	d.problems.add(position(d.file, node), format, args...)
}

// object decodes a mapping into a struct by its yaml tags. path is its position, "" at the top; extra lists keys
// handled elsewhere.
func (d *decoder) object(node *yaml.Node, into reflect.Value, path string, extra ...string) {
	if node.Kind != yaml.MappingNode {
		d.add(node, "%sis %s; it must be a mapping of keys to values", prefix(path), describeNode(node))
		return
	}
	fields := fieldsOf(into.Type())
	for _, pair := range d.pairs(node, path) {
		key := pair.key.Value
		index := slices.Index(fields, key)
		switch {
		case slices.Contains(extra, key):
		case index < 0:
			d.add(pair.key, "%s", unknownName("key", join(path, key), key, append(slices.Clone(extra), fields...)))
		default:
			d.value(pair.value, into.Field(index), join(path, key))
		}
	}
}

// pair is one entry of a mapping.
type pair struct{ key, value *yaml.Node }

// pairs lists the entries of a mapping, with text keys and no duplicates.
func (d *decoder) pairs(node *yaml.Node, path string) []pair {
	first := make(map[string]*yaml.Node)
	var pairs []pair
	for i := 0; i+1 < len(node.Content); i += 2 {
		key := node.Content[i]
		switch {
		case key.Kind == yaml.AliasNode || key.ShortTag() == "!!merge":
			d.add(key, "%saliases and merge keys are not supported; write the value out", prefix(path))
		case key.Kind != yaml.ScalarNode || key.ShortTag() == "!!null":
			d.add(key, "%sa key must be a text", prefix(path))
		case first[key.Value] != nil:
			d.add(key, "%s: is given twice, first in line %d", join(path, key.Value), first[key.Value].Line)
		default:
			first[key.Value] = key
			pairs = append(pairs, pair{key, node.Content[i+1]})
		}
	}
	return pairs
}

// value decodes a node into a field. An empty value keeps the field.
func (d *decoder) value(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind == yaml.AliasNode {
		d.add(node, "%s: aliases are not supported; write the value out", path)
		return
	}
	if node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" {
		return
	}
	switch into.Type() {
	case reflect.TypeFor[json.RawMessage]():
		d.raw(node, into, path)
		return
	case reflect.TypeFor[time.Duration]():
		d.duration(node, into, path)
		return
	}
	switch into.Kind() {
	case reflect.Struct:
		d.object(node, into, path)
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		d.value(node, into.Elem(), path)
	case reflect.Slice:
		d.list(node, into, path)
	case reflect.Map:
		if into.Type().Elem().Kind() == reflect.Interface {
			d.openValue(node, into, path)
			return
		}
		d.mapping(node, into, path)
	case reflect.Interface:
		d.openValue(node, into, path)
	default:
		d.scalar(node, into, path)
	}
}

// mapping decodes a mapping whose values have a fixed type.
func (d *decoder) mapping(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind != yaml.MappingNode {
		d.add(node, "%s: is %s; it must be a mapping of keys to values", path, describeNode(node))
		return
	}
	into.Set(reflect.MakeMap(into.Type()))
	for _, pair := range d.pairs(node, path) {
		value := reflect.New(into.Type().Elem()).Elem()
		d.value(pair.value, value, join(path, pair.key.Value))
		into.SetMapIndex(reflect.ValueOf(pair.key.Value), value)
	}
}

func (d *decoder) list(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind != yaml.SequenceNode {
		d.add(node, "%s: is %s; it must be a list", path, describeNode(node))
		return
	}
	items := reflect.MakeSlice(into.Type(), len(node.Content), len(node.Content))
	for i, item := range node.Content {
		d.value(item, items.Index(i), fmt.Sprintf("%s[%d]", path, i))
	}
	into.Set(items)
}

// openValue decodes a value without a fixed type, such as a JSON Schema.
func (d *decoder) openValue(node *yaml.Node, into reflect.Value, path string) {
	if into.Type() == reflect.TypeFor[map[string]string]() && node.Kind == yaml.MappingNode {
		texts := map[string]string{}
		for _, pair := range d.pairs(node, path) {
			var text string
			d.scalar(pair.value, reflect.ValueOf(&text).Elem(), join(path, pair.key.Value))
			texts[pair.key.Value] = text
		}
		into.Set(reflect.ValueOf(texts))
		return
	}
	value := reflect.ValueOf(d.plain(node, path, 0))
	switch {
	case !value.IsValid():
	case value.Type().AssignableTo(into.Type()):
		into.Set(value)
	default:
		d.add(node, "%s: is %s; it must be a mapping of keys to values", path, describeNode(node))
	}
}

func (d *decoder) raw(node *yaml.Node, into reflect.Value, path string) {
	raw, err := json.Marshal(d.plain(node, path, 0))
	if err != nil {
		d.add(node, "%s: %s", path, err)
		return
	}
	into.SetBytes(raw)
}

func (d *decoder) duration(node *yaml.Node, into reflect.Value, path string) {
	value, err := time.ParseDuration(node.Value)
	if err != nil || node.Kind != yaml.ScalarNode {
		d.add(node, "%s: is %s; it must be a duration such as 500ms, 30s or 24h", path, describeNode(node))
		return
	}
	into.SetInt(int64(value))
}

// scalar decodes text, numbers and booleans. Every scalar is valid text; scalar makes no other conversion.
func (d *decoder) scalar(node *yaml.Node, into reflect.Value, path string) {
	wanted, tags := "a number", []string{"!!int", "!!float"}
	switch {
	case into.Kind() == reflect.String:
		wanted, tags = "text", nil
	case into.Kind() == reflect.Bool:
		wanted, tags = "true or false", []string{"!!bool"}
	case into.CanInt() || into.CanUint():
		wanted, tags = "a whole number", []string{"!!int"}
	}
	fits := node.Kind == yaml.ScalarNode && node.ShortTag() != "!!binary" &&
		(tags == nil || slices.Contains(tags, node.ShortTag()))
	if fits && tags == nil {
		into.SetString(node.Value)
		return
	}
	if !fits || node.Decode(into.Addr().Interface()) != nil {
		d.add(node, "%s: is %s; it must be %s", path, describeNode(node), wanted)
	}
}

// plain converts a node to its JSON value.
func (d *decoder) plain(node *yaml.Node, path string, depth int) any {
	switch {
	case depth > maxDepth:
		d.add(node, "%s: is nested more than %d deep", path, maxDepth)
	case node.Kind == yaml.AliasNode:
		d.add(node, "%s: aliases are not supported; write the value out", path)
	case node.Kind == yaml.MappingNode:
		object := make(map[string]any, len(node.Content)/2)
		for _, pair := range d.pairs(node, path) {
			object[pair.key.Value] = d.plain(pair.value, join(path, pair.key.Value), depth+1)
		}
		return object
	case node.Kind == yaml.SequenceNode:
		list := make([]any, len(node.Content))
		for i, item := range node.Content {
			list[i] = d.plain(item, fmt.Sprintf("%s[%d]", path, i), depth+1)
		}
		return list
	default:
		return d.plainScalar(node, path)
	}
	return nil
}

func (d *decoder) plainScalar(node *yaml.Node, path string) any {
	var value any
	switch node.ShortTag() {
	case "!!str", "!!timestamp":
		return node.Value
	case "!!null", "!!bool", "!!int", "!!float":
		if err := node.Decode(&value); err != nil {
			d.add(node, "%s: %s cannot be read: %s", path, describeNode(node), err)
		}
	default:
		d.add(node, "%s: the tag %s is not supported", path, node.Tag)
	}
	if f, ok := value.(float64); ok && (math.IsNaN(f) || math.IsInf(f, 0)) {
		d.add(node, "%s: %s is not a number that JSON has", path, node.Value)
		return nil
	}
	return value
}

// describeNode describes a node in an error.
func describeNode(node *yaml.Node) string {
	switch node.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	if node.ShortTag() == "!!null" {
		return "empty"
	}
	return fmt.Sprintf("%q", textcut.Text(node.Value, 40))
}

func fieldsOf(t reflect.Type) []string {
	names := make([]string, t.NumField())
	for i := range names {
		names[i], _, _ = strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
	}
	return names
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func prefix(path string) string {
	if path == "" {
		return ""
	}
	return path + ": "
}
