package redact

import (
	"slices"
	"strings"
)

// command is a group of programs that accept a secret under the same flags.
type command struct {
	secret   argument
	letters  string   // single-letter flags
	flags    []string // named flags
	programs []string
}

// argument is the form of a secret argument.
type argument int

const (
	whole           argument = iota // -p secret or -psecret
	login                           // the same, but a word such as -path is another flag
	glued                           // only -psecret; after a blank it is no secret
	userAndPassword                 // -u user:secret
)

// passwordCommands are programs with a password argument under an ordinary flag.
var passwordCommands = [...]command{
	{userAndPassword, "uU", []string{"--user", "--proxy-user"}, []string{"curl"}},
	{glued, "p", nil, []string{
		"mysql", "mysqldump", "mysqladmin", "mysqlimport", "mysqlshow", "mysqlcheck", "mysqlsh", "mysqlslap",
		"mariadb", "mariadb-dump", "mariadb-admin", "mariadb-import", "mariadb-show", "mariadb-check", "7z", "7za", "7zz",
	}},
	{login, "p", nil, []string{"login"}}, // of docker, helm registry, oc, az and others
	{whole, "p", nil, []string{
		"sshpass", "mongo", "mongosh", "mongodump", "mongorestore", "mongoexport", "mongoimport",
	}},
	{whole, "a", nil, []string{"redis-cli", "valkey-cli"}},
	{whole, "w", nil, []string{"ldapsearch", "ldapmodify", "ldapadd", "ldapdelete", "ldapwhoami", "ldappasswd"}},
	{whole, "P", nil, []string{"sqlcmd", "bcp", "unzip", "zip"}},
}

// commands are the rules for these programs in text.
var commands = func() []rule {
	var all []rule
	for i := range passwordCommands {
		c := &passwordCommands[i]
		all = append(all, rule{
			name: c.programs[0], keywords: commandKeywords(c.programs), bounded: true, find: c.secretAt,
		})
	}
	return all
}()

// longestCommand bounds the scanned bytes of a command line.
const longestCommand = 2 << 10

// secretAt finds the first secret in the command at index at of s.
func (c *command) secretAt(s string, at int) (from, to int) {
	rest := s[at:min(len(s), at+longestCommand)]
	for _, program := range c.programs {
		after, found := cutPrefixFold(rest, program)
		after, _ = cutPrefixFold(after, ".exe")
		if !found || after == "" || after[0] != ' ' && after[0] != '\t' {
			continue
		}
		base := at + len(rest) - len(after)
		if start, end := c.firstSecret(after, program); start < end {
			return base + start, base + end
		}
	}
	return at, at
}

// cutPrefixFold is [strings.CutPrefix] in any letter case: Windows ignores the case of a program's name.
func cutPrefixFold(s, prefix string) (after string, found bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// commandKeywords are the program names with a trailing blank, because many are ordinary words.
func commandKeywords(programs []string) []string {
	all := make([]string, 0, 2*len(programs))
	for _, program := range programs {
		all = append(all, program+" ", program+".exe ")
	}
	return all
}

// firstSecret finds the first secret in a program's arguments, which end with the line or the next command.
func (c *command) firstSecret(s, program string) (from, to int) {
	for i := 0; i < len(s); {
		for i < len(s) && (s[i] == ' ' || s[i] == '\t' || continued(s, i)) {
			i++
		}
		end := i + wordEnd(s[i:])
		if end == i || strings.EqualFold(s[i:end], program) {
			return 0, 0 // the end of the command, or the next one
		}
		if value, ok := c.flagValue(s, i, end); ok {
			from, to = c.secretPart(s, value, value+wordEnd(s[value:]))
			switch {
			case from < to && s[from:to] != Marker:
				return from, to
			case from < to && c.secret != userAndPassword:
				return 0, 0 // the program's only one, already removed
			}
		}
		i = end
	}
	return 0, 0
}

// continued reports whether the backslash or newline at index i continues a command.
func continued(s string, i int) bool {
	return s[i] == '\\' && i+1 < len(s) && (s[i+1] == '\n' || s[i+1] == '\r') ||
		s[i] == '\r' && i > 0 && s[i-1] == '\\' ||
		s[i] == '\n' && i > 0 && (s[i-1] == '\\' || i > 1 && s[i-2:i] == "\\\r")
}

// flagValue returns where the value of the flag s[i:end] begins, if the flag carries a secret.
func (c *command) flagValue(s string, i, end int) (value int, ok bool) {
	word := s[i:end]
	for _, name := range c.flags {
		if rest, found := strings.CutPrefix(word, name); found {
			if strings.HasPrefix(rest, "=") {
				return i + len(name) + 1, true
			}
			if rest == "" {
				return end + blanks(s[end:]), true
			}
		}
	}
	if len(word) < 2 || word[0] != '-' || word[1] == '-' {
		return 0, false
	}
	at := 1
	if c.secret == userAndPassword { // flags without an argument may precede it: -sSu
		for at < len(word) && isLetter(word[at]) && strings.IndexByte(c.letters, word[at]) < 0 {
			at++
		}
	}
	if at == len(word) || strings.IndexByte(c.letters, word[at]) < 0 {
		return 0, false
	}
	if at+1 < len(word) {
		return i + at + 1, c.secret != login || !isLongFlag(word[1:])
	}
	return end + blanks(s[end:]), c.secret != glued
}

// longFlags are flags of login commands that begin with p, and no -p with a glued secret.
var longFlags = []string{
	"password", "password-stdin", "passcode", "path", "port", "print", "profile", "project", "provider", "plugin",
}

// isLongFlag reports whether a word is one of longFlags, such as path or path=value.
func isLongFlag(word string) bool {
	name, _, _ := strings.Cut(word, "=")
	return slices.Contains(longFlags, strings.ToLower(name))
}

// secretPart returns the secret in the argument s[i:to], without quotes.
func (c *command) secretPart(s string, i, to int) (from, end int) {
	if i < to && (s[i] == '"' || s[i] == '\'') {
		if quote := s[i]; to-i > 1 && s[to-1] == quote {
			to--
		}
		i++
	}
	if c.secret != userAndPassword {
		return i, to
	}
	colon := strings.IndexByte(s[i:to], ':')
	if colon < 0 {
		return i, i
	}
	return i + colon + 1, to
}

// maxWrapperWords bounds the words before a program, such as those of sudo, env and timeout.
const maxWrapperWords = 16

// withoutPasswords redacts a command that is a list of words.
func withoutPasswords(out []any) []any {
	for at := range min(len(out)-1, maxWrapperWords) {
		if c := commandOf(out[at]); c != nil {
			c.withoutPasswords(out[at:])
		}
	}
	return out
}

// withoutPasswords redacts the arguments of a program, which is the first word.
func (c *command) withoutPasswords(out []any) {
	for i := 1; i < len(out); i++ {
		word, _ := out[i].(string)
		value, ok := c.flagValue(word, 0, len(word))
		at := i
		if ok && value == len(word) && i+1 < len(out) {
			at, value = i+1, 0
		}
		argument, isText := out[at].(string)
		if !ok || !isText || value > len(argument) {
			continue
		}
		if from, to := c.secretPart(argument, value, len(argument)); from < to {
			out[at] = argument[:from] + Marker
		}
	}
}

// commandOf returns the command that a word names.
func commandOf(word any) *command {
	path, _ := word.(string)
	if len(path) > longestCommand {
		return nil
	}
	program := strings.TrimSuffix(strings.ToLower(path[strings.LastIndexAny(path, `/\`)+1:]), ".exe")
	for i := range passwordCommands {
		if slices.Contains(passwordCommands[i].programs, program) {
			return &passwordCommands[i]
		}
	}
	return nil
}

// wordEnd returns the length of the first word of s, including quotes.
func wordEnd(s string) int {
	var quote byte
	for i := range len(s) {
		switch {
		case quote != 0:
			if s[i] == quote {
				quote = 0
			}
		case s[i] == '"' || s[i] == '\'':
			quote = s[i]
		case strings.IndexByte(" \t\r\n;|&<>`()", s[i]) >= 0:
			return i
		}
	}
	return len(s)
}
