package workspace

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
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

// HasFiles reports whether a folder has a file that [LoadDir] reads.
func HasFiles(dir string) bool {
	files, _ := find(os.DirFS(dir)) // LoadDir reports what cannot be read
	return len(files) > 0
}

// LoadFrom is LoadDir for files from elsewhere; dir names the folder in positions.
func LoadFrom(fsys fs.FS, dir string) (Workspace, error) { return load(fsys, dir) }

// Load reads every .yaml and .yml file of a folder and its subfolders, except hidden files and folders. For invalid
// files it returns [Problems] and an empty workspace. A folder without such files is an error, because an apply with
// [PruneAll] would remove everything.
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

// find lists the YAML files. It includes links to files, but does not follow links to folders.
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
		if node := root.Content[0]; node.ShortTag() != "!!null" && !l.hasNUL(shown, node) {
			l.document(shown, node)
		}
	}
}

// hasNUL reports the texts and keys below a node that PostgreSQL cannot store.
func (l *loader) hasNUL(file string, node *yaml.Node) bool {
	found := strings.Contains(node.Value, "\x00")
	if found {
		l.problems.add(position(file, node), "the text has the character U+0000, which PostgreSQL cannot store")
	}
	for _, below := range node.Content {
		found = l.hasNUL(file, below) || found
	}
	return found
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
	position := s.at("name")
	if first, taken := l.first[kind+" "+name]; taken {
		l.problems.add(position, "name: there is another %s %q at %s", kind, name, first)
		return
	}
	l.first[kind+" "+name] = position
}

// rejectZero rejects a 0 at a path of a number whose default a definition writes as 0. advice follows the path.
func (l *loader) rejectZero(s source, path, advice string) {
	node, n := s.node, 1.0
	for _, step := range steps(path) {
		if node = lookup(node, step); node == nil {
			return
		}
	}
	if slices.Contains([]string{"!!int", "!!float"}, node.ShortTag()) && node.Decode(&n) == nil && n == 0 {
		l.problems.add(position(s.file, node), "%s: is 0; %s", path, advice)
	}
}

var yamlLine = regexp.MustCompile(`^line (\d+): `)

// syntaxError splits a parser error into its line and its message. The line is 0 if the error names none.
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

// syntaxAdvice returns the fix for a parser message; "" for an unknown one.
func syntaxAdvice(message string) string {
	for problem, todo := range map[string]string{
		"cannot start any token": "indent with blanks and not with a tab, and quote a text that begins with @, ` or %",
		"mapping values are not allowed": `quote a text that has a ":", ` +
			"and give the keys of a mapping the same indentation",
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
