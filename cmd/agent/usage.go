package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// positionalArgs checks the number of arguments.
func positionalArgs(least, most int, want string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || (most >= 0 && len(args) > most) {
			return &exitError{exitUsage, helpHint(fmt.Errorf("%s takes %s", cmd.CommandPath(), want), cmd)}
		}
		return nil
	}
}

// messageArg accepts one message, or none when the command reads them elsewhere.
func messageArg(cmd *cobra.Command, args []string) error {
	if len(args) == 1 && strings.TrimSpace(args[0]) == "" {
		return &exitError{exitUsage, helpHint(errors.New("the message is empty; pass a text"), cmd)}
	}
	return positionalArgs(0, 1, "at most one message; quote it")(cmd, args)
}

func helpHint(err error, cmd *cobra.Command) error {
	return hint(err, "see %s --help", cmd.CommandPath())
}

// unknownCommand returns the error of an unknown command, with the nearest name below parent.
func unknownCommand(command, word string, parent *cobra.Command) error {
	var names []string
	for _, below := range parent.Commands() {
		if !below.Hidden {
			names = append(names, below.Name())
		}
	}
	err := fmt.Errorf("there is no command %s", command)
	if near := nearest.To(word, names); near != "" {
		err = fmt.Errorf("%w; did you mean %s %s?", err, parent.CommandPath(), near)
	}
	return &exitError{exitUsage, helpHint(err, parent)}
}

// suggestFlag adds the nearest flag to the error of an unknown one, and words the error of an invalid number.
func suggestFlag(err error, cmd *cobra.Command) error {
	invalid, is := errors.AsType[*pflag.InvalidValueError](err)
	if _, number := errors.AsType[*strconv.NumError](err); is && number {
		want := map[bool]string{true: "true or false", false: "a number"}[invalid.GetFlag().Value.Type() == "bool"]
		if errors.Is(err, strconv.ErrRange) {
			want = "a number within bounds"
		}
		return fmt.Errorf("invalid argument %q for --%s: not %s", invalid.GetValue(), invalid.GetFlag().Name, want)
	}
	missing, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	if near := nearest.To(missing.GetSpecifiedName(), names); near != "" && len(missing.GetSpecifiedName()) > 1 {
		return fmt.Errorf("%w; did you mean --%s?", err, near)
	}
	return err
}

// helpCommand is agent help COMMAND, the same as agent COMMAND --help.
func (c *cli) helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				word := ""
				if len(args) == 1 {
					word = args[0]
				}
				return unknownCommand(strings.Join(args, " "), word, cmd.Root())
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		},
	}
}

// showHelp prints help. With --json it is a usage error, because help is no result.
func showHelp(cmd *cobra.Command, _ []string) error {
	if asked, err := cmd.Flags().GetBool("json"); err == nil && asked {
		return &exitError{exitUsage, helpHint(fmt.Errorf("%s takes a command", cmd.CommandPath()), cmd)}
	}
	return cmd.Help()
}

// refuseUnknownShells makes an unknown shell of agent completion an error. Cobra's default is to print help.
func refuseUnknownShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() != "completion" {
			continue
		}
		cmd.RunE = showHelp
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			var shells []string
			for _, shell := range cmd.Commands() {
				shells = append(shells, shell.Name())
			}
			return &exitError{exitUsage, helpHint(fmt.Errorf("unknown shell %q; name one of %s", args[0],
				strings.Join(shells, ", ")), cmd)}
		}
	}
}
